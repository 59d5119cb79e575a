"""How long answers will be: what a prompt's text says, and what finished answers have taught."""
