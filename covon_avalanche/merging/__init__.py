"""Slow steps: how the weights of a new task are merged with those of the earlier ones.

Works with any optimizer; never imports Avalanche.
"""
