"""One request from start to end: legs, retries, relay; knows no web framework."""
