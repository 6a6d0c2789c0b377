"""The ground: facts, words, kernels, the capture directory. Imports no other floor and no framework; all above may import it."""
