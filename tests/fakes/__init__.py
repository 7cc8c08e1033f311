"""Fakes on real sockets: engines, clients, and the proxy between them."""
