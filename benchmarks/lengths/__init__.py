"""How well an answer's length can be known before it is written: RT-LM's ladder (figure 2)."""
