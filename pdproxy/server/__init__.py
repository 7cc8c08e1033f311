"""HTTP in: routes, generate, admin, operations, failures as OpenAI errors."""
