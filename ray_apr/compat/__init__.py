"""Names that Ray, PyTorch and Transformers do not promise to keep: import them from here."""
