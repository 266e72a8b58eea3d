"""Figures from stored results, one module per analysis; nothing here loads a checkpoint or computes a statistic."""
