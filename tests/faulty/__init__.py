"""Programs with one fault each: `run(backend)` ends with the message that a user gets."""
