"""What answers cost while the page is open, and once a grammar has been used."""
