"""Mixture-of-experts layer on comm_core: router, experts, and communication that overlaps through autograd."""
