from __future__ import annotations

from collections.abc import Callable
from functools import partial

import bm25s

from roll_lite.config.schema.environments import SearchToolConfig
from roll_lite.data.sources import read_rows
from roll_lite.files import read_text

WORD = r"[぀-ヿ㐀-䶿一-鿿]|[^\W぀-ヿ㐀-䶿一-鿿]+"
"""Words are separated by spaces and punctuation; each Chinese or Japanese character is a word."""
tokenize = partial(bm25s.tokenize, token_pattern=WORD, show_progress=False)


def search_in(settings: SearchToolConfig) -> Callable[[str], str]:
    documents: list[str] = []
    if settings.corpus.suffix == ".txt":
        lines = enumerate(read_text(settings.corpus).splitlines(), 1)
        documents += [f"[{number}]\n{line}" for number, line in lines if line.strip()]
    else:
        for row in read_rows(settings.corpus):
            content = row.content if isinstance(row.content, dict) else {}
            if not isinstance(text := content.get(settings.text), str):
                raise ValueError(f"text: {row.place}: no text in column {settings.text!r}; columns: {', '.join(content) or row.content}")
            head = " ".join(str(content[name]) for name in ("id", "title") if name in content) or row.number
            documents.append(f"[{head}]\n{text}")
    if not documents:
        raise ValueError(f"corpus: {settings.corpus} has no documents")
    index = bm25s.BM25()
    index.index(tokenize(documents, stopwords=None), show_progress=False)

    def search(query: str) -> str:
        """Search a collection of documents by keywords. Returns the documents that match best, each after its id and title in brackets.

        Args:
            query: Words to look for. Few specific words, such as names and technical terms, find more than a whole question.
        """
        words = tokenize([query], stopwords="en", return_ids=False)
        words = words if words[0] else tokenize([query], stopwords=None, return_ids=False)  # such as "The Who"
        [found], [scores] = index.retrieve(words, k=min(settings.results, len(documents)), show_progress=False)
        shown = [documents[one] for one, score in zip(found, scores, strict=True) if score > 0]
        return "\n\n".join(shown) or "No document has any of these words."

    return search
