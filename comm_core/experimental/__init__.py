"""The experimental calls of DeepEP's V2 interface: stored entries (Engram), pipeline messages, all-gather sessions."""
