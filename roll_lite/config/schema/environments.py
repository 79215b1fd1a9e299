"""Sections of environments, which answer a policy's responses over several turns."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from roll_lite.config.schema.base import Mistakes, PositiveFloat, PositiveInt, Section, UserPath, rule

CallFormat = Literal["hermes", "qwen3_coder", "llama3", "mistral"]


class EnvironmentSection(Section):
    """Settings that all environments have."""

    max_turns: PositiveInt = 8
    """Maximum responses in an episode. An episode that needs more ends with finish reason max_turns."""
    max_turn_tokens: PositiveInt | None = None
    """Longest response of one turn in tokens. null: only sampling.max_tokens applies, which limits all tokens after the first prompt
    together."""
    turn_timeout_s: PositiveFloat = 60.0
    """Seconds in which the environment must answer a response; then the attempt fails."""
    rewards: Literal["sum", "last", "per_turn"] = "sum"
    """Score of an episode. sum: the sum of its responses' rewards. last: the reward of the last response. per_turn: the sum too, but in
    training each response's reward goes to its own last token; needs the estimator reinforce, reinforce_plus_plus, gae, gigpo or custom."""
    workers: PositiveInt = 1
    """Processes that play this domain's episodes."""
    parallel: PositiveInt = 256
    """Maximum episodes at a time in one worker; others wait."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds to start a worker, which imports the environment."""
    call_format: CallFormat | None = None
    """Format of the model's tool calls; null: the format of its chat template."""


class FunctionEnvironmentConfig(EnvironmentSection):
    """A class or an async function of your own (docs/environments.md)."""

    name: Literal["function"]
    function: str
    """Dotted path to a class with `reset` and `step`, or to an async function `(task, policy)`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""


class PythonToolConfig(Section):
    """Python interpreter in a sandbox, one for each episode. Its state is kept from call to call."""

    name: Literal["python"]
    timeout_s: PositiveFloat = 10.0
    """Time limit of a call in seconds. Code that takes longer gets a KeyboardInterrupt; if it ignores that, the interpreter is killed."""
    memory_mb: PositiveInt = 512
    """Memory of an interpreter and its child processes."""
    files: str | None = None
    """Column with the files of the interpreter's folder, {file name: text}; null in rows without files. null: no files."""
    python_path: list[UserPath] = Field(default_factory=list)
    """Folders that code may import from, besides the standard library."""
    allow_unprotected: bool = False
    """Run code even if it cannot be isolated."""


class SearchToolConfig(Section):
    """Search in local documents by keywords (BM25)."""

    name: Literal["search"]
    corpus: UserPath
    """Documents: JSON lines, or a text file with one document per line. Columns `id` and `title`, if present, are shown with the text."""
    text: str = "text"
    """Column with the text of a document."""
    results: PositiveInt = 5
    """Maximum documents that a search returns."""


class McpToolConfig(Section):
    """Tools of a Model Context Protocol (MCP) server. Each episode that calls them opens a session."""

    name: Literal["mcp"]
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program of a server on standard input and output, with its arguments. Each session starts it."""
    url: str | None = None
    """Address of a running server (Streamable HTTP)."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for `command`, besides HOME, PATH and the like."""
    tools: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the server's tools that the model may call; null: all."""

    @rule
    def _one_server(self) -> Mistakes:
        if (self.command is None) == (self.url is None):
            yield "", "one server is needed: set either `command` or `url`"


class FunctionToolConfig(Section):
    """Python function of your own."""

    name: str
    """Dotted path to a function with type hints and a docstring, sync or async."""


ToolConfig = PythonToolConfig | SearchToolConfig | McpToolConfig | FunctionToolConfig


class ToolsEnvironmentConfig(EnvironmentSection):
    """Tools that the model may call. The first response without a call ends the episode; the domain's reward scores it."""

    name: Literal["tools"]
    tools: Annotated[list[ToolConfig], Field(min_length=1)]
    """Dotted paths to Python functions, and the shipped tools python, search and mcp. The chat template describes them to the model."""
    max_result_chars: Annotated[int, Field(ge=200, le=200_000)] = 8000
    """Longest result of a call, in characters. A longer one is shown without its middle."""

    @rule
    def _in_time(self) -> Mistakes:
        for number, tool in enumerate(self.tools):
            if isinstance(tool, PythonToolConfig) and tool.timeout_s >= self.turn_timeout_s:
                message = f"is not below turn_timeout_s ({self.turn_timeout_s:g}), after which the attempt fails; use less, or raise that"
                yield f"tools.{number}.timeout_s", message


class EndpointEnvironmentConfig(EnvironmentSection):
    """An agent that calls the policy through OpenAI's or Anthropic's API, and need not know about the training.

    sampling.max_prompt_tokens + sampling.max_tokens limit each of its conversations."""

    name: Literal["endpoint"]
    function: str | None = None
    """Dotted path to your function `(task, endpoint) -> reward or answer`, sync or async. The domain's reward scores an answer."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and its arguments. It gets the task as JSON on standard input, and the endpoint in the environment variables OPENAI_BASE_URL,
    OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. The last line that it prints is its reward or answer."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @rule
    def _one_agent(self) -> Mistakes:
        if (self.function is None) == (self.command is None):
            yield "function", "name either a function or a command"


class AdapterSection(EnvironmentSection):
    """Settings of environments from other projects. The extra roll_lite[NAME] installs the package of the environment NAME."""

    package: ClassVar[str]
    """Package to import."""


class GymEnvironmentConfig(AdapterSection):
    """An environment with Gymnasium's interface whose observations and actions are texts, or can be written as such."""

    package = "gymnasium"
    name: Literal["gym"]
    id: str | None = None
    """Registered id for gymnasium.make: FrozenLake-v1, or package:Id-v0 if importing the package registers it."""
    function: str | None = None
    """Dotted path to an environment's class, or to a function that returns an environment; in place of `id`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of gymnasium.make, or of `function`."""
    action: str | None = None
    """Dotted path to your function `text -> action`. If it raises ValueError, the policy is shown the message and responds again. null: in
    a text space the response is the action, in a discrete space its last whole number."""
    columns: list[str] = Field(default_factory=list)
    """Columns of the data row that `reset` gets as options."""

    @rule
    def _one_source(self) -> Mistakes:
        if (self.id is None) == (self.function is None):
            yield "id", "name one environment: either its registered `id`, or the `function` that makes it"


class TextArenaEnvironmentConfig(AdapterSection):
    """A game of TextArena for one player."""

    package = "textarena"
    name: Literal["textarena"]
    id: str
    """Id of the game, such as Mastermind-v0."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the game."""


class ReasoningGymEnvironmentConfig(AdapterSection):
    """Tasks that reasoning-gym generates: one question, one answer within <answer> tags, and the dataset's own score."""

    package = "reasoning_gym"
    name: Literal["reasoning_gym"]
    dataset: str
    """Name of the dataset, such as leg_counting."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the dataset."""


def _server(url: str) -> str:
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ValueError("is no address of a server; write one such as http://127.0.0.1:8000")
    return url


class OpenEnvEnvironmentConfig(AdapterSection):
    """An environment on an OpenEnv server. Each episode is one session."""

    package = "openenv"
    name: Literal["openenv"]
    url: Annotated[str, AfterValidator(_server)]
    """Address of the server. It must allow as many sessions as episodes run at a time: workers x parallel."""
    action: str
    """Field of the action that the response goes into; or dotted path to your function `text -> action`, which returns a dict. If it raises
    ValueError, the policy is shown the message and responds again."""
    observation: str | None = None
    """Field of the observation that the policy is shown; or dotted path to your function `observation -> text`. null: the whole observation
    as JSON."""
    columns: list[str] = Field(default_factory=list)
    """Columns of the data row that `reset` gets as arguments."""


class VerifiersEnvironmentConfig(AdapterSection):
    """An environment of verifiers (`load_environment`). Its rubric scores the episode."""

    package = "verifiers"
    name: Literal["verifiers"]
    id: str
    """Id of the environment: the name of its installed package, or of a module."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its `load_environment`."""


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
