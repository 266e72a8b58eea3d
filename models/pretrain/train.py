"""Pretraining on one device: bf16 autocast, AdamW, warm-up + stable + decay, checkpoints at log-spaced tokens."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from kernels.attention import attention_plan
from models.checkpoint import save
from models.hybrid_lm import HybridLM
from models.mixers.attention import FullAttention
from models.presets import preset_from_name
from models.pretrain.config import PretrainConfig, token_count
from models.pretrain.data import TokenStream, prefetched
from models.pretrain.graph import GraphedStep
from models.pretrain.schedule import checkpoint_steps, learning_rate_factor
from models.pretrain.state import load_state, save_state
from models.pretrain.validation import Validation
from models.tokenizer import Tokenizer

RUN, LOG = "run.json", "log.jsonl"
BETAS = (0.9, 0.95)
# Inductor of torch 2.11 pads the strides of intermediate results and then reads some with the padding that were written
# without it: gradients of Mamba-2 were wrong by 4 % at lengths where T * H is no multiple of 32.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"comprehensive_padding": False}


def pretrain(config: PretrainConfig) -> HybridLM:
    """Trains, or resumes where the last checkpoint was, and returns the model, uncompiled and hookable.

    Raises ValueError if the folder holds a run of another configuration, or corpus and preset do not fit.
    """
    run = Run(config)
    try:
        with run.compiled():
            run.train()
    finally:
        run.close()
    return run.model


class Run:
    """One training run: model, optimizer, data and log."""

    def __init__(self, config: PretrainConfig):
        self.config = config
        self.device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        shape = preset_from_name(config.preset)
        self.context: int = config.context or shape.context_length or 0  # a preset says its length
        vocabulary = config.vocabulary or shape.vocab_size
        shape = dataclasses.replace(shape, context_length=self.context, vocab_size=vocabulary)
        tokenizer = Tokenizer.from_file(config.corpus / "tokenizer.json")
        if tokenizer.vocab_size > shape.vocab_size:
            raise ValueError(
                f"{config.corpus}/tokenizer.json has {tokenizer.vocab_size} tokens; "
                f"the model's vocabulary would be {shape.vocab_size}."
            )
        length = self.context + 1  # inputs and targets overlap but for one token
        self.stream = TokenStream(config.corpus / "train.bin", length, config.seed, config.niah_share, tokenizer)
        self.validation = Validation(config.corpus / "val.bin", length, tokenizer, self.device)
        self.tokens_per_step = config.batch_size * self.context
        self.steps = max(1, round(token_count(config.tokens) / self.tokens_per_step))
        torch.manual_seed(config.seed)
        self.model = HybridLM(shape, config.impl).to(self.device).train()
        self.model.tokenizer = tokenizer
        self.graph = config.graph if config.graph is not None else self.device.type == "cuda"
        if self.graph and self.device.type != "cuda":
            raise ValueError(f"--graph on device {self.device}; expected a CUDA device. Leave --graph out.")
        self.optimizer = _adamw(self.model, config, capturable=self.graph)
        self._claim_folder()
        self.progress = load_state(config.out, self.model, self.optimizer) or {"step": 0, "needles": 0, "seconds": 0.0}
        self.log = (config.out / LOG).open("a")

    def _claim_folder(self) -> None:
        description = json.loads(json.dumps(dataclasses.asdict(self.config), default=str))
        for field in (
            "out",
            "corpus",
            "device",
            "impl",
            "compile",
            "graph",
        ):  # where and on what it runs does not change what it is
            description.pop(field)
        path = self.config.out / RUN
        if path.exists():
            found = json.loads(path.read_text())
            if differing := sorted(key for key in description if found.get(key) != description[key]):
                key = differing[0]
                raise ValueError(
                    f"{self.config.out} holds a run with {key} = {found.get(key)!r}, not {description[key]!r}; "
                    "choose another --out."
                )
        else:
            self.config.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(description, indent=1) + "\n")

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Blocks and loss compiled inside only: a compiled block would ignore hooks that are added later."""
        wanted = self.config.compile if self.config.compile is not None else self.device.type == "cuda"
        self.loss_of = torch.compile(_loss, options=COMPILE_OPTIONS) if wanted else _loss
        if wanted:
            for layer in self.model.layers:
                for mixer in layer.mixers:
                    if mixer.impl == "torch" and isinstance(mixer, FullAttention):  # masks are made outside the graph
                        attention_plan(self.context, self.context, mixer.bands(), self.device)
                layer.block.compile(options=COMPILE_OPTIONS)
        try:
            yield
        finally:
            for block in self.model.blocks:
                block._compiled_call_impl = None

    def train(self) -> None:
        due = set(checkpoint_steps(self.steps, self.config.checkpoints))
        self.step: Callable[[Tensor], Tensor] = GraphedStep(self._step) if self.graph else self._step
        first = self.progress["step"]
        started, losses = time.perf_counter(), []
        bar = tqdm(total=self.steps * self.tokens_per_step, initial=first * self.tokens_per_step,
                   unit="tok", unit_scale=True, desc=self.config.preset, mininterval=1.0)  # fmt: skip
        for step, (rows, needles) in enumerate(
            prefetched(self.stream, first, self.steps, self.config.batch_size), start=first + 1
        ):
            losses.append(self._update(step, rows))
            self.progress["needles"] += needles
            bar.update(self.tokens_per_step)
            if step % self.config.log_every == 0 or step in due:
                loss = torch.stack(losses).mean().item()  # the only wait for the device
                losses.clear()
                seconds = self.progress["seconds"] + time.perf_counter() - started
                self._write(step, seconds, loss=loss)
                bar.set_postfix(loss=f"{loss:.3f}")
            if step in due:
                self.progress.update(step=step, seconds=seconds)
                self._checkpoint(step)
                started = time.perf_counter()  # validation and writing are not training time
        bar.close()

    def _update(self, step: int, rows: Tensor) -> Tensor:
        config = self.config
        factor = learning_rate_factor(step, self.steps, config.warmup_steps, config.decay_share)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(config.learning_rate * factor)
            else:
                group["lr"] = config.learning_rate * factor
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return self.step(rows)

    def _step(self, rows: Tensor) -> Tensor:
        with self._autocast():
            loss = self.loss_of(self.model.final_hidden(rows[:, :-1]), self.model.unembed.weight, rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _checkpoint(self, step: int) -> None:
        tokens = step * self.tokens_per_step
        measured = self.validation(self._logits, self.config.batch_size)
        self._write(step, self.progress["seconds"], **measured)
        folder = self.config.out / f"step_{step:08d}"
        if not folder.exists():  # a resumed run may pass here again
            training = {"step": step, "tokens": tokens, **self.progress, **measured}
            save(self.model, folder, training=training, dtype=torch.bfloat16)
        save_state(self.config.out, self.model, self.optimizer, self.progress)

    def _logits(self, ids: Tensor) -> Tensor:
        # With gradients on, so that the blocks compiled for training serve here too; nothing calls backward.
        with self._autocast():
            return self.model(ids).detach()

    def _write(self, step: int, seconds: float, **values: Any) -> None:
        tokens = step * self.tokens_per_step
        line = {
            "step": step,
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "needles": self.progress["needles"],
            **values,
        }
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()

    def close(self) -> None:
        self.log.close()


def _loss(hidden: Tensor, unembedding: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, unembedding).float().flatten(0, 1), targets.flatten())


def _adamw(model: HybridLM, config: PretrainConfig, capturable: bool) -> torch.optim.AdamW:
    decayed = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "conv" not in name]
    chosen = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    device = next(model.parameters()).device
    rate = torch.tensor(config.learning_rate, device=device) if capturable else config.learning_rate
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True, capturable=capturable)
    for group in optimizer.param_groups if capturable else ():
        group["lr"] = torch.tensor(config.learning_rate, device=device)  # one tensor a group, changed in place
    return optimizer
