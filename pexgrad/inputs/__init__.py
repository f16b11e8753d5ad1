"""What a call is given: a model with all that it holds and reads, parameters, examples, a loss."""
