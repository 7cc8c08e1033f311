"""Inputs that nobody would write: against the HTTP face, through the real command."""
