"""From a model's output to the losses (B,) of its examples, in one of four ways; `decide.py` says which, once for each trace:

1. one of torch's own losses without its reduction, which is then done for each example (`torch_losses.py`);
2. a loss (B, ...) is called for the batch, and for a few examples alone wherever its code takes another branch (`batched.py`);
3. a loss of one number is called for the batch, its reductions taken for each example, where that is right (`reduced.py`);
4. any other is called for each example: the definition (`loss.py`).
"""
