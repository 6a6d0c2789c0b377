"""What a comparison is: two runs as graphs, their normal form, distances of tensors, and the verdict on them."""
