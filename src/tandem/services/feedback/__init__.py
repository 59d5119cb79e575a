"""What users say of answers, and the samples that are made of it."""
