"""What a processor that others use costs, by how threads wait and how many there are."""
