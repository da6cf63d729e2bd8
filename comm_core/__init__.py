"""Expert-parallel communication: dispatch and combine behind DeepEP's interface. Knows no model and no Megatron."""
