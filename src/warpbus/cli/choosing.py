"""How `warpbus quantize` chooses scheme and algorithm: --recommend, auto and --bits."""

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from warpbus.cli.language import Console
from warpbus.cli.models import DEMO, model_directory
from warpbus.cli.progress import progress_bar
from warpbus.cli.tables import recommendation_table
from warpbus.cuda.devices import resolve_device
from warpbus.cuda.memory_size import parse_memory
from warpbus.demo import calibration_path
from warpbus.errors import UsageError
from warpbus.models import ModelConfig
from warpbus.qtensor import Scheme, Schemes
from warpbus.quantization.driver import ALGORITHMS
from warpbus.quantization.mixed import mixed_schemes
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.recommend import GOALS, Recommendation
from warpbus.quantization.texts import GENERAL_TEXTS
from warpbus.quantization.trials import try_candidates

AUTO = "auto"
DEFAULT_SCHEME, DEFAULT_ALGORITHM = "w4a16-g128", "gptq"


@dataclass(frozen=True)
class QuantizeRequest:
    """The scheme and algorithm that the flags ask for, checked.

    Attributes:
        model: as typed.
        scheme, algorithm: as requested; None lets trials decide, if `tried`.
        tried: whether candidates are tried.
        goal, memory: see `Recommendation`.
        bits: average bits per weight; None for one scheme for all matrices.
        calibration: the calibration file; None if nothing is calibrated.
        options: format, calibration data and device.
    """

    model: str
    scheme: str | None
    algorithm: str | None
    tried: bool
    goal: str
    memory: str | None
    bits: float | None
    calibration: Path | None
    options: QuantizationOptions

    @classmethod
    def of(
        cls,
        model: str,
        scheme: str | None,
        algorithm: str | None,
        *,
        recommend: bool,
        goal: str | None,
        memory: str | None,
        bits: float | None,
        calibration: Path | None,
        options: QuantizationOptions,
    ) -> "QuantizeRequest":
        """Check the flags.

        Raises:
            UsageError: they contradict each other.
        """
        if algorithm is not None and algorithm not in (*ALGORITHMS, AUTO):
            raise UsageError(f"--algorithm is {algorithm!r}: choose from {', '.join((*ALGORITHMS, AUTO))}")
        tried = recommend or AUTO in (scheme, algorithm)
        for flag, value in (("--goal", goal), ("--memory", memory)):
            if value is not None and not tried:
                raise UsageError(f"{flag} needs --recommend or --algorithm auto: add one of them")
        if goal is not None and goal not in GOALS:
            raise UsageError(f"--goal is {goal!r}: choose from {', '.join(GOALS)}")
        if bits is not None and (tried or scheme is not None):
            raise UsageError("--bits chooses the schemes itself: drop --scheme, --recommend and auto")
        if calibration is None and (tried or bits is not None or algorithm != "rtn"):
            calibration = calibration_path() if model == DEMO else GENERAL_TEXTS
        if tried:
            scheme, algorithm = (None if each == AUTO else each for each in (scheme, algorithm))
        else:
            scheme = DEFAULT_SCHEME if scheme is None else scheme
            algorithm = DEFAULT_ALGORITHM if algorithm is None else algorithm
        return cls(model, scheme, algorithm, tried, goal or GOALS[0], memory, bits, calibration, options)

    def recommendation(self) -> Recommendation:
        """Try the candidates."""
        from warpbus.engine import Stored, least_memory  # slow to import, and rarely needed

        assert self.calibration is not None
        memory = None if self.memory is None else parse_memory(self.memory, _card(self.options.device))

        def running(config: ModelConfig, dtype: torch.dtype, scheme: Scheme) -> int:
            half = dtype if dtype.itemsize == 2 else torch.bfloat16
            return least_memory(Stored.uniform(config, half, scheme), memory or 0)

        directory = model_directory(self.model)
        with progress_bar() as show:
            return try_candidates(
                directory,
                calibration=self.calibration,
                goal=self.goal,
                memory=memory,
                running=running,
                scheme=None if self.scheme is None else Scheme.parse(self.scheme),
                algorithm=self.algorithm,
                options=self.options,
                progress=lambda done, total: show("trying", done, total),
            )

    def choice(self) -> "Choice":
        """The scheme and algorithm to use; a choice made by trials is printed to stderr."""
        console = Console(stderr=True)
        if self.tried:
            found = self.recommendation()
            console.print(recommendation_table(found))
            remarks: dict[str, object] = {"recommended": f"{found.chosen.name}: {found.reason}", "goal": self.goal}
            if found.memory is not None:
                remarks["memory"] = found.memory
            return Choice(found.chosen.scheme, found.chosen.algorithm, remarks)
        assert self.algorithm is not None
        if self.bits is None:
            assert self.scheme is not None
            return Choice(self.scheme, self.algorithm, {})
        assert self.calibration is not None
        directory = model_directory(self.model)
        with progress_bar() as show:
            schemes = mixed_schemes(
                directory,
                self.bits,
                calibration=self.calibration,
                options=self.options,
                progress=lambda done, total: show("measuring", done, total),
            )
        return Choice(schemes, self.algorithm, {"bits": self.bits})

    def show(self, found: Recommendation, *, as_json: bool) -> None:
        """Print the recommendation and the command that applies it."""
        command = self.command(found, "OUTPUT")
        if as_json:
            print(json.dumps(found.to_json() | {"command": command}, ensure_ascii=False))
            return
        console = Console()
        console.print(recommendation_table(found))
        console.print(command, highlight=False, markup=False, soft_wrap=True)

    def command(self, found: Recommendation, output: str) -> str:
        """The command line that applies a recommendation."""
        chosen = found.chosen
        words = ["warpbus", "quantize", self.model, output, "--scheme", chosen.scheme, "--algorithm", chosen.algorithm]
        if chosen.algorithm != "rtn" and self.model != DEMO and self.calibration != GENERAL_TEXTS:
            words += ["--calibration", str(self.calibration)]
        if self.options.format != "compressed-tensors":
            words += ["--format", self.options.format]
        return shlex.join(words)


@dataclass(frozen=True)
class Choice:
    """Arguments of `quantize`."""

    scheme: str | Schemes
    algorithm: str
    remarks: Mapping[str, object]


def _card(device: str) -> int:
    """Total memory in bytes of the device, which percentages refer to."""
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        return torch.cuda.get_device_properties(resolved).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
