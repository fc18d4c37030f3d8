"""`warpbus quantize` writes a quantized copy of a model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from warpbus.cli.completion import complete_model, one_of
from warpbus.cli.language import Console
from warpbus.cli.models import is_here, model_directory
from warpbus.cli.options import FieldOption, options_of
from warpbus.cli.verdict import check_output
from warpbus.dist.watchdog import SHORTEST_LIMIT
from warpbus.errors import UsageError
from warpbus.quantization.options import QuantizationOptions

FORMATS = ("compressed-tensors", "gptq", "gptq-v2", "awq", "modelopt", "warpbus")
SCHEMES = (
    "int4",
    "w2a16-g64",
    "w3a16-g128",
    "w4a16-g128",
    "w4a16-g64",
    "w4a16-g32-asym",
    "w8a16",
    "w8a8-int8",
    "w8a8-fp8",
)
"""Schemes that the shell completes; --scheme takes more."""

_AT_ONCE = (None, "gptq", "awq", "smoothquant")
"""Values of --algorithm with which worker processes are started early: no trials run first, and all share the work."""


@options_of(
    {"given": QuantizationOptions},
    output=...,
    scheme=...,
    algorithm=...,
    recommend=...,
    goal=...,
    memory=...,
    bits=...,
    format=FieldOption(f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}", choices=FORMATS),
    head="also quantize the head, to a scheme such as w8a16-g128; compressed-tensors only",
    embedding="also quantize the embedding, to w8a16-g128 or w8a16; compressed-tensors only",
    kv_cache=FieldOption(
        "calibrate scales for an 8-bit KV cache: fp8 or int8, or fp8-head, int8-head with a scale per head",
        choices=("fp8", "int8", "fp8-head", "int8-head"),
    ),
    effort=FieldOption(
        "normal, or high: afterwards trains the scales on the predictions of MODEL, for a lower KL",
        choices=QuantizationOptions.efforts,
    ),
    calibration=...,
    samples="maximum number of calibration sequences, instead of a number of tokens",
    tokens="number of calibration tokens; by default 262144, in at most 4096 sequences",
    seqlen="maximum tokens per sequence",
    seed="random seed for choosing sequences",
    device="auto, cpu, cuda or cuda:N",
    gpus="all, a number of GPUs, or GPU indexes such as 0,2",
    processes="number of processes, with --device cpu or --cluster",
    cluster="a Ray cluster with --processes GPUs: auto, or ray://HOST:PORT",
    damping="fraction of the mean added to each Hessian's diagonal",
    overwrite="replace the model at OUTPUT",
    restart="discard the finished layers of an earlier run to OUTPUT and start over",
    rank_timeout=FieldOption(
        "seconds after which the run ends if one of its processes is stalled", least=SHORTEST_LIMIT
    ),
)
def quantize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", autocompletion=complete_model, help="model directory, name on a hub, or demo"),
    ],
    given: dict[str, Any],
    output: Annotated[
        Path | None, typer.Argument(metavar="OUTPUT", help="a new directory for the quantized model")
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="w<2|3|4|5|6|8>a16, then -g32, -g64 or -g128 (else one scale per row), then -asym; or w8a8-int8, "
            "w8a8-fp8; int4 is w4a16-g128; or auto",
            show_default="w4a16-g128",
            autocompletion=one_of(*SCHEMES, "auto"),
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="gptq, awq, smoothquant (for w8a8), or rtn (fast, no calibration, less accurate); or auto: as "
            "recommended by --recommend, for any scheme unless --scheme is given",
            show_default="gptq",
            autocompletion=one_of("gptq", "awq", "smoothquant", "rtn", "auto"),
        ),
    ] = None,
    recommend: Annotated[
        bool,
        typer.Option("--recommend", help="try candidates on sample layers, print the recommendation, write nothing"),
    ] = False,
    goal: Annotated[
        str | None,
        typer.Option(
            help="goal of --recommend and auto: quality, speed or size",
            show_default="quality",
            autocompletion=one_of("quality", "speed", "size"),
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="for --recommend and auto: memory limit of the running model, such as 6GB")
    ] = None,
    bits: Annotated[
        float | None, typer.Option(help="average bits per weight, such as 3.5: chooses a scheme for each matrix")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help=".txt, or .jsonl of texts or conversations, like those that the model will see",
            show_default="packaged texts: English, Chinese, code, chat",
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="compare with MODEL on this .jsonl or .txt afterwards, or on demo"),
    ] = None,
    questions: Annotated[Path | None, typer.Option(help="with --evaluate: .jsonl of multiple-choice questions")] = None,
    max_perplexity_increase: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="with --evaluate: exit with 1 above this increase, such as 5%")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="price of a GPU-hour, to estimate the cost")] = None,
    electricity: Annotated[float | None, typer.Option(min=0.0, help="price of a kWh, to estimate the cost")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="write a PNG of the errors and of the results of --evaluate here")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="with --evaluate: write an HTML report here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Quantize the linear layers of MODEL and write it to OUTPUT. vLLM, SGLang and transformers can load the result.

    The packaged model includes its data: warpbus quantize demo poet-w4 --samples 256 --evaluate demo
    """
    from warpbus.quantization.prestart import start_processes

    options = QuantizationOptions(**given)
    if recommend and options.head is not None:
        raise UsageError("--head has no part in --recommend: leave it out, and give it with the command that quantizes")
    if recommend and options.embedding is not None:
        raise UsageError("--embedding has no part in --recommend: give it with the command that quantizes")
    if recommend and options.kv_cache is not None:
        raise UsageError("--kv-cache has no part in --recommend: give it with the command that quantizes")
    if recommend and options.effort != QuantizationOptions.effort:
        raise UsageError("--effort has no part in --recommend: give it with the command that quantizes")
    at_once = algorithm in _AT_ONCE and scheme != "auto" and bits is None and not recommend
    if at_once and output and options.cluster is None and is_here(model):
        # Before anything else loads torch.
        start_processes(device=options.device, gpus=str(options.gpus), processes=options.processes)

    from warpbus.cli.choosing import QuantizeRequest
    from warpbus.cli.quantizing import shown
    from warpbus.formats.files import check_kept, check_target
    from warpbus.formats.parts import FinishedParts
    from warpbus.quantization import quantize as run
    from warpbus.quantization.driver import check_arguments
    from warpbus.quantization.texts import GENERAL_TEXTS

    request = QuantizeRequest.of(
        model,
        scheme,
        algorithm,
        recommend=recommend,
        goal=goal,
        memory=memory,
        bits=bits,
        calibration=calibration,
        options=options,
    )
    if recommend:
        _say_calibration(model_directory(model), general=request.calibration == GENERAL_TEXTS)
        request.show(request.recommendation(), as_json=as_json)
        return
    if output is None:
        raise UsageError("OUTPUT is missing: name a new directory for the quantized model")
    if not FinishedParts(output).begun:  # otherwise OUTPUT may be of the same run, killed before it removed its parts
        check_target(output, overwrite=options.overwrite)  # before a model is downloaded or calibrated
    if request.scheme is not None and request.algorithm is not None:  # before a model is downloaded
        check_arguments(request.scheme, request.algorithm, options)
    asked = check_output(
        model_directory(model),
        evaluate=evaluate,
        questions=questions,
        max_perplexity_increase=max_perplexity_increase,
        plot=plot,
        html=html,
        as_json=as_json,
    )
    check_kept(output, *(path for path in (asked.data, asked.questions) if path is not None))
    _say_calibration(model_directory(model), general=request.calibration == GENERAL_TEXTS)
    chosen = request.choice()
    if chosen.algorithm == "rtn":  # the others calibrate, and refuse such a model
        _warn_of_no_tokenizer(model_directory(model))
    with shown(output) as progress:
        report = run(
            model_directory(model),
            output,
            scheme=chosen.scheme,
            algorithm=chosen.algorithm,
            calibration=request.calibration,
            **given,
            remarks=chosen.remarks,
            progress=progress,
        )
    asked.show(report.priced(gpu_hour=price, kwh=electricity), options.device)


def _warn_of_no_tokenizer(directory: Path) -> None:
    """Tell that neither the model nor its quantized form can read text."""
    from warpbus.models.tokenizers import has_tokenizer

    if directory.is_dir() and not has_tokenizer(directory):
        Console(stderr=True, soft_wrap=True).print(
            f"warning: {directory}: no tokenizer: the quantized model cannot chat, nor be served or evaluated, until "
            "the tokenizer files of the model's source are copied into it",
            highlight=False,
            markup=False,
        )


def _say_calibration(directory: Path, *, general: bool) -> None:
    """Tell that the packaged texts are used: they suit a general model, but not one of a single domain.

    Of a model that is not there, that is the only thing to say.
    """
    if general and directory.exists():
        console = Console(stderr=True, soft_wrap=True)
        console.print("calibrating on the packaged texts (English, Chinese, code, chat); --calibration takes your own")
