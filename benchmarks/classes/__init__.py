"""All classes of work at once on the engine, and what that costs the online requests."""
