"""More requests than a server can bear, in simulation."""
