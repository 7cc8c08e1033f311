"""Simulated engines that speak the wire format of vLLM and keep KV books."""
