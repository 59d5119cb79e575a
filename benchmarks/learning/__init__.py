"""Learning from a stream of preferences while serving, by policy: win rate, CLPD, latency."""
