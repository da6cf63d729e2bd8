"""Leaf helpers: devices, environment, errors, tracing. Imports the standard library and torch alone."""
