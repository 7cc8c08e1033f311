"""Pure: a KV transfer protocol as two request bodies and an order."""
