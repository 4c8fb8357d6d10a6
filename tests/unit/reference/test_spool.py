import tempfile

import pytest
import torch

from pabench.errors import ExecutionError
from pabench.reference.spool import LogitSpool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_bit_for_bit(dtype):
    rows = torch.randn(5, 33).to(dtype)
    with LogitSpool(33, dtype) as spool:
        for i in (3, 0, 4):
            spool.put((0, i), rows[i])
        assert len(spool) == 3
        assert (0, 1) not in spool
        for i in (0, 3, 4):
            assert torch.equal(spool.get((0, i)), rows[i])


def test_a_full_disk_is_one_sentence(monkeypatch):
    class Full:
        def seek(self, at):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with LogitSpool(4, torch.float32) as spool, pytest.raises(ExecutionError, match=r"No space left.*set TMPDIR"):
        spool.put((0, 0), torch.zeros(4))
