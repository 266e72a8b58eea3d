"""`python -m models.pretrain --preset mini/swa-32 --corpus corpus --tokens 130M --out runs/swa-32`"""

from __future__ import annotations

from models.command_line import run
from models.pretrain.config import PretrainConfig


def main(config: PretrainConfig) -> None:
    from models.pretrain.train import pretrain

    pretrain(config)


if __name__ == "__main__":
    run(main, PretrainConfig)
