"""Pure decisions about requests, replies, load and instances: no I/O, clock or randomness."""
