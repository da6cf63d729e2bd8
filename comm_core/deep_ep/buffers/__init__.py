"""The buffers by the upstream module names."""
