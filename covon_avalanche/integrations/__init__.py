"""Posterior optimizers in the training loops of other libraries.

``lightning`` and ``huggingface`` have a callback each, and nothing else imports these libraries.
"""
