import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        # links are shaped in real time, and leftovers are looked for on the whole machine
        if item.path.name.startswith("test_lab"):
            item.add_marker(pytest.mark.alone)
