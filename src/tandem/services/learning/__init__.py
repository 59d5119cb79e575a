"""SERVE: samples become steps, steps candidates, and candidates, past the gate, versions."""
