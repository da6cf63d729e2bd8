"""An accelerator played on the CPU: torch_musa's interface, and the kernels of comm_core/kernels on host memory."""
