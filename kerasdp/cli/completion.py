"""Writes what shells need to complete the command `kerasdp`: its sub-commands, and the flags of each."""

from kerasdp.cli import kit
from kerasdp.cli.recipes import recipe_in
from kerasdp.config.choices import Choice

_BASH = """\
# Completes the command kerasdp. Put this line into ~/.bashrc:  source <(kerasdp completion bash)
_kerasdp() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" flags=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        --*) COMPREPLY=($(compgen -W "$flags" -- "$word"))
            [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace ;;
        *) COMPREPLY=($(compgen -f -- "${{word#*=}}")) ;;
    esac
}}
complete -F _kerasdp kerasdp"""

_ZSH = """\
# Completes the command kerasdp. Put this line into ~/.zshrc:  source <(kerasdp completion zsh)
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, recipes: list[str], others: list[str]) -> str:
    """Returns the script that a shell reads.

    Args:
        shell: one of `SHELLS`.
        recipes: names of the recipes, which have flags.
        others: names of the other sub-commands.
    """
    if shell == "fish":
        return _fish(recipes, others)
    cases = [f'        {name}) flags="{_as_typed(name)}" ;;' for name in recipes]
    bash = _BASH.format(commands=" ".join([*recipes, *others]), cases="\n".join(cases))
    return bash if shell == "bash" else _ZSH + bash.partition("\n")[2]


def _fish(recipes: list[str], others: list[str]) -> str:
    lines = ["# Completes the command kerasdp. In ~/.config/fish/config.fish:  kerasdp completion fish | source"]
    lines += [f"complete -c kerasdp -n __fish_use_subcommand -f -a {name}" for name in [*recipes, *others]]
    for name in recipes:
        for choice in _choices(name):
            takes = "" if bool in choice.kinds else " -r"
            text = choice.help.partition(".")[0].replace("'", "")
            for flag in choice.flags:
                lines.append(
                    f"complete -c kerasdp -n '__fish_seen_subcommand_from {name}' -l {flag}{takes} -d '{text}'"
                )
    return "\n".join(lines)


def _choices(name: str) -> list[Choice]:
    """Returns the choices that are flags of a recipe; none of a recipe that reads its command line by itself."""
    found = recipe_in(kit.recipes()[name].path)
    return found.choices() if found else []


def _as_typed(name: str) -> str:
    """Returns the flags of a recipe as the start of what is typed."""
    return " ".join(f"--{flag}{'' if bool in c.kinds else '='}" for c in _choices(name) for flag in c.flags)
