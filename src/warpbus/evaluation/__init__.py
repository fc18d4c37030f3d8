"""Measures the quality and speed of models and compares them.

The public names are loaded when they are first used: the command line checks names of tasks before it imports torch.
"""

from typing import TYPE_CHECKING

from warpbus.lazy import lazy_names

if TYPE_CHECKING:
    from warpbus.evaluation.choices import Question, choice_accuracy, read_questions
    from warpbus.evaluation.intervals import Confidence, confidence
    from warpbus.evaluation.likelihood import Score, score
    from warpbus.evaluation.side_by_side import Evaluation, check_data, evaluate
    from warpbus.evaluation.speed import Speed, measure_speed
    from warpbus.evaluation.verdict import Verdict, judge

__all__ = [
    "Confidence",
    "Evaluation",
    "Question",
    "Score",
    "Speed",
    "Verdict",
    "check_data",
    "choice_accuracy",
    "confidence",
    "evaluate",
    "judge",
    "measure_speed",
    "read_questions",
    "score",
]

__getattr__ = lazy_names(
    __name__,
    choices=("Question", "choice_accuracy", "read_questions"),
    intervals=("Confidence", "confidence"),
    likelihood=("Score", "score"),
    side_by_side=("Evaluation", "check_data", "evaluate"),
    speed=("Speed", "measure_speed"),
    verdict=("Verdict", "judge"),
)
