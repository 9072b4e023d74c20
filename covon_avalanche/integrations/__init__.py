"""Posterior optimizers, Ada-Reg and EWC* in the training loops of other libraries.

``lightning`` and ``huggingface`` have callbacks, and nothing else imports these libraries.
"""
