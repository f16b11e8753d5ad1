"""A whole call as one functional graph without autograd, and what runs such a graph."""
