"""Writes what shells need to complete the command `kerasdp`: its sub-commands, and the flags of each."""

from kerasdp.cli.flags import FLAGS, GROUPS

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
    cases = [f'        {name}) flags="{" ".join(_as_typed(flag) for flag in _flags_of(name))}" ;;' for name in recipes]
    bash = _BASH.format(commands=" ".join([*recipes, *others]), cases="\n".join(cases))
    return bash if shell == "bash" else _ZSH + bash.partition("\n")[2]


def _fish(recipes: list[str], others: list[str]) -> str:
    lines = ["# Completes the command kerasdp. In ~/.config/fish/config.fish:  kerasdp completion fish | source"]
    lines += [f"complete -c kerasdp -n __fish_use_subcommand -f -a {name}" for name in [*recipes, *others]]
    for name in recipes:
        for flag in _flags_of(name):
            takes = " -r" if _as_typed(flag).endswith("=") else ""
            text = str(FLAGS[flag].help).partition(".")[0].replace("'", "")
            lines.append(f"complete -c kerasdp -n '__fish_seen_subcommand_from {name}' -l {flag}{takes} -d '{text}'")
    return "\n".join(lines)


def _flags_of(recipe: str) -> list[str]:
    """Returns the flags of a recipe: those of all recipes, and its own groups."""
    return [
        flag
        for group, names in GROUPS.items()
        for flag in names
        if "recipes/" not in group or f"recipes/{recipe}.py" in group
    ]


def _as_typed(flag: str) -> str:
    return f"--{flag}" if FLAGS[flag].boolean else f"--{flag}="
