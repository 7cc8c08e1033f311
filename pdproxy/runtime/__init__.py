"""Settings, logs, metrics and the worker that wires everything."""
