"""Errors of clients in words."""


def error_in_words(error: BaseException) -> str:
    """The type and text of an error; only the type where there is no text, as in a TimeoutError. Texts of
    Kafka errors name the type already.
    """
    kind, text = type(error).__name__, str(error).strip()
    if not text:
        return kind
    return text if kind in text else f"{kind}: {text}"
