"""Measurements: every script checks its numbers first, then reports medians and ratios of one run."""
