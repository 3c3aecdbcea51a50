"""What `pdserve demo` asks, and what a right answer holds. The texts are our own, made for this."""

from dataclasses import dataclass
from importlib import resources

from pdserve.core.request import RouteTaken

_READ = "Read this text and answer the question."


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One chat message, the words that the answer has to hold, and the way it has to go."""

    shown: str  # what the terminal shows of it
    content: str
    answer_holds: str
    route: RouteTaken


def questions() -> tuple[Question, ...]:
    """A short one, one of about 300 tokens, one of about 1,500."""
    capital = "What is the capital of France? Answer in one sentence."
    return (
        Question(shown=capital, content=capital, answer_holds="Paris", route=RouteTaken.LOCAL),
        _about("ferry.txt", "What is the name of the captain of the ferry?", "Ingrid Solberg"),
        _about(
            "archive.txt",
            "What is the colour of the ink in which the library writes to its readers?",
            "green",
        ),
    )


def _about(name: str, question: str, answer_holds: str) -> Question:
    text = (resources.files(__package__) / name).read_text(encoding="utf-8")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    body = "\n\n".join(paragraphs)
    return Question(
        shown=f"[a text of {len(body.split())} words] {question}",
        content=f"{_READ}\n\n{body}\n\nQuestion: {question}",
        answer_holds=answer_holds,
        route=RouteTaken.DISAGGREGATED,
    )
