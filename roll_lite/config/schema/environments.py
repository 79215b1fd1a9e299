from __future__ import annotations

import shutil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.schema.base import Mistakes, NonEmpty, PositiveFloat, PositiveInt, Section, UserPath, missing_extra, rule
from roll_lite.config.user_function import check_function
from roll_lite.files import elsewhere, is_file

CallFormat = Literal["hermes", "qwen3_coder", "llama3", "mistral"]


class EnvironmentSection(Section):
    max_turns: PositiveInt = 8
    """Maximum responses in an episode; then it ends with finish reason max_turns."""
    max_turn_tokens: PositiveInt | None = None
    """Longest response of one turn in tokens. sampling.max_tokens limits all tokens after the first prompt."""
    turn_timeout_s: PositiveFloat = 60.0
    """Seconds for the environment's answer; then the attempt fails."""
    rewards: Literal["sum", "last", "per_turn"] = "sum"
    """Score of an episode: sum or last of its responses' rewards. per_turn: the sum, but training gives each reward to its response's last
    token; needs advantage reinforce, reinforce_plus_plus, gae, gigpo or custom."""
    workers: PositiveInt = 1
    """Processes that run this domain's episodes."""
    parallel: PositiveInt = 256
    """Maximum concurrent episodes per worker."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds for a worker to start and import the environment."""
    call_format: CallFormat | None = None
    """Format of the model's tool calls; null: the chat template's."""


class FunctionEnvironmentConfig(EnvironmentSection):
    """Your class or async function (docs/environments.md)."""

    name: Literal["function"]
    function: str
    """Dotted path to a class with `reset` and `step`, or async function `(task, policy)`."""
    args: dict[str, Any] = {}
    """Keyword arguments."""

    @rule
    def _callable(self) -> Mistakes:
        yield from check_function("function", self.function, self.args, or_class=True, inputs=("a task", "the policy"))


class PythonToolConfig(Section):
    """Sandboxed Python interpreter, one per episode. Its state is kept between calls."""

    name: Literal["python"]
    timeout_s: PositiveFloat = 10.0
    """Seconds for a call; then the code gets a KeyboardInterrupt, and is killed if it ignores that."""
    memory_mb: PositiveInt = 512
    """Memory limit of an interpreter and its child processes in MB."""
    files: str | None = None
    """Data column with files for the interpreter's folder: {file name: text}, or null."""
    python_path: list[UserPath] = []
    """Folders that code may import from."""
    allow_unprotected: bool = False
    """Run code even if it cannot be isolated."""


class SearchToolConfig(Section):
    """Keyword search (BM25) in local documents."""

    name: Literal["search"]
    corpus: UserPath
    """File of documents: JSON lines (besides the text, `id` and `title` are shown), or text with one document per line."""
    text: str = "text"
    """JSON field with a document's text."""
    results: PositiveInt = 5
    """Maximum documents per search."""

    @rule
    def _searchable(self) -> Mistakes:
        if not is_file(self.corpus):
            yield "corpus", f"there is no such file{elsewhere(self.corpus)}"

    @rule
    def _installed(self) -> Mistakes:
        yield from missing_extra("bm25s", self.name)


class McpToolConfig(Section):
    """Tools of a Model Context Protocol (MCP) server, one session per episode."""

    name: Literal["mcp"]
    command: NonEmpty[str] | None = None
    """Command line of a server on standard input and output, started per session."""
    url: str | None = None
    """Address of a running server (Streamable HTTP)."""
    env: dict[str, str] = {}
    """Environment variables for `command`, besides HOME, PATH and the like."""
    tools: NonEmpty[str] | None = None
    """Tools that the model may call; null: all."""

    @rule
    def _one_server(self) -> Mistakes:
        if (self.command is None) == (self.url is None):
            yield "", "one server is needed: set either `command` or `url`"

    @rule
    def _installed(self) -> Mistakes:
        yield from missing_extra("mcp", self.name)


class FunctionToolConfig(Section):
    """Your Python function."""

    name: str
    """Dotted path to a function with type hints and a docstring."""

    @rule
    def _callable(self) -> Mistakes:
        yield from check_function("name", self.name, None)


ToolConfig = PythonToolConfig | SearchToolConfig | McpToolConfig | FunctionToolConfig


class ToolsEnvironmentConfig(EnvironmentSection):
    """Tools that the model may call. The first response without a call ends the episode, which the domain's reward scores."""

    name: Literal["tools"]
    tools: NonEmpty[ToolConfig]
    """Tools, described to the model by the chat template: python, search, mcp, or dotted paths to Python functions."""
    max_result_chars: Annotated[int, Field(ge=200, le=200_000)] = 8000
    """Longest result of a call in characters; longer ones lose their middle."""

    @rule
    def _in_time(self) -> Mistakes:
        for number, tool in enumerate(self.tools):
            if isinstance(tool, PythonToolConfig) and tool.timeout_s >= self.turn_timeout_s:
                message = f"is not below turn_timeout_s ({self.turn_timeout_s:g}), after which the attempt fails; use less, or raise that"
                yield f"tools.{number}.timeout_s", message


class EndpointEnvironmentConfig(EnvironmentSection):
    """Agent that calls the policy through OpenAI's or Anthropic's API. sampling.max_prompt_tokens + sampling.max_tokens limit each
    conversation."""

    name: Literal["endpoint"]
    function: str | None = None
    """Dotted path to your function `(task, endpoint) -> reward or answer`. The domain's reward scores an answer."""
    command: NonEmpty[str] | None = None
    """Program and arguments. It gets the task as JSON on standard input, and the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. Its last line of output is its reward or answer."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""

    @rule
    def _one_agent(self) -> Mistakes:
        if (self.function is None) == (self.command is None):
            yield "function", "name either a function or a command"

    @rule
    def _callable(self) -> Mistakes:
        if self.function is not None:
            yield from check_function("function", self.function, self.args, inputs=("a task", "the endpoint"))
        elif self.command is not None and shutil.which(self.command[0]) is None:
            yield "command", "is no program on the PATH of this machine"


class AdapterSection(EnvironmentSection):
    """Settings of environments from other projects, which need the extra roll_lite[NAME]."""

    package: ClassVar[str]
    name: str

    @rule
    def _installed(self) -> Mistakes:
        yield from missing_extra(self.package, self.name)


class GymEnvironmentConfig(AdapterSection):
    """Gymnasium environment whose observations and actions are texts, or can be converted to texts."""

    package = "gymnasium"
    name: Literal["gym"]
    id: str | None = None
    """Registered id: FrozenLake-v1, or package:Id-v0 to import its package first."""
    function: str | None = None
    """Dotted path to a class or function that makes the environment, in place of `id`."""
    args: dict[str, Any] = {}
    """Keyword arguments of gymnasium.make or `function`."""
    action: str | None = None
    """Dotted path to your function `text -> action`. If it raises ValueError, the policy sees the message and responds again. null: the
    action is the response or, in a discrete space, the last integer in it."""
    columns: list[str] = []
    """Data columns that `reset` gets as options."""

    @rule
    def _one_source(self) -> Mistakes:
        if (self.id is None) == (self.function is None):
            yield "id", "name one environment: either its registered `id`, or the `function` that makes it"

    @rule
    def _callable(self) -> Mistakes:
        if self.function is not None:
            yield from check_function("function", self.function, self.args, or_class=True, inputs=())
        if self.action is not None:
            yield from check_function("action", self.action, {}, inputs=("the response",))


class TextArenaEnvironmentConfig(AdapterSection):
    """TextArena game for one player."""

    package = "textarena"
    name: Literal["textarena"]
    id: str
    """Id of the game, such as Mastermind-v0."""
    args: dict[str, Any] = {}
    """Keyword arguments of the game."""


class ReasoningGymEnvironmentConfig(AdapterSection):
    """Tasks of reasoning-gym: one question, one answer within <answer> tags."""

    package = "reasoning_gym"
    name: Literal["reasoning_gym"]
    dataset: str
    """Name of the dataset, such as leg_counting."""
    args: dict[str, Any] = {}
    """Settings of the dataset."""


def _server(url: str) -> str:
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ValueError("is no address of a server; write one such as http://127.0.0.1:8000")
    return url


class OpenEnvEnvironmentConfig(AdapterSection):
    """Environment on an OpenEnv server, one session per episode."""

    package = "openenv"
    name: Literal["openenv"]
    url: Annotated[str, AfterValidator(_server)]
    """Server address. The server must allow workers x parallel sessions."""
    action: str
    """Name of the action's field that holds the response; or dotted path to your function `text -> dict`. If it raises ValueError, the
    policy sees the message and responds again."""
    observation: str | None = None
    """Name of the observation's field that the policy sees; or dotted path to your function `observation -> text`. null: the whole
    observation as JSON."""
    columns: list[str] = []
    """Data columns that `reset` gets as arguments."""

    @rule
    def _callable(self) -> Mistakes:
        if "." in self.action:
            yield from check_function("action", self.action, {}, inputs=("the response",))
        if self.observation is not None and "." in self.observation:
            yield from check_function("observation", self.observation, {}, inputs=("the observation",))


class VerifiersEnvironmentConfig(AdapterSection):
    """Environment of the library `verifiers`, scored by the environment's rubric."""

    package = "verifiers"
    name: Literal["verifiers"]
    id: str
    """Name of the environment's installed package, or of a module."""
    args: dict[str, Any] = {}
    """Keyword arguments of `load_environment`."""


EnvironmentConfig = (
    FunctionEnvironmentConfig
    | ToolsEnvironmentConfig
    | EndpointEnvironmentConfig
    | GymEnvironmentConfig
    | TextArenaEnvironmentConfig
    | ReasoningGymEnvironmentConfig
    | OpenEnvEnvironmentConfig
    | VerifiersEnvironmentConfig
)
