"""Train over a thin wire: data-parallel PyTorch with compressed communication."""
