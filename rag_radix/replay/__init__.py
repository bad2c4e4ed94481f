"""Replay of request traces without a model: workloads, policies, and the clairvoyant bound."""
