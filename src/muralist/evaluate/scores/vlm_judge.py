"""Scores by a vision-language model that answers questions about an image: VQAScore, GenEval 2 and DPG-Bench.

The judge is any image-text-to-text model of transformers. Each question is asked alone, and the probability of the
answer is that of its first token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.core.errors import UserError, first_line
from muralist.data.decode import ImageDecodeError, decode_image
from muralist.data.tables import table_rows
from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.encoders import Encoder, LoadedEncoder, file_sha256
from muralist.evaluate.features import pair_items
from muralist.evaluate.inputs import prompt_id
from muralist.evaluate.scores import SCORES, ImageScore, load_checkpoint, unusable
from muralist.settings import EvaluateSettings

if TYPE_CHECKING:
    from muralist.evaluate.scores import ComputeFeatures

_YES = ("Yes", "yes", " yes", " Yes")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_GENEVAL2_FILE = "geneval2_data.jsonl of facebookresearch/GenEval2 on GitHub"
_DPG_FILE = "dpg_bench/dpg_bench.csv of TencentQQGYLab/ELLA on GitHub"


class Question(NamedTuple):
    """A question about an image, and the answers that count; only their first tokens are compared."""

    text: str
    answers: tuple[str, ...]


class Answer(NamedTuple):
    """What the judge thinks of a question's answers."""

    probability: float
    """The sum of the answers' probabilities; NaN where the judge cannot take the image."""
    is_first: bool
    """Whether one of them is the judge's most likely answer."""


@dataclass(frozen=True)
class JudgeEncoder(Encoder):
    """Two numbers for an image and a question: the probability of the answers, and whether one is the most likely."""

    key: str = "geneval2"
    """The score of which messages speak."""

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights, in the precision in which they are stored."""
        from transformers import AutoModelForImageTextToText, GenerationConfig

        # Straight onto the device: eight processes would need eight copies in the memory of the machine.
        options = {"dtype": "auto", "device_map": {"": device}}
        model = load_checkpoint(self.key, self.source, AutoModelForImageTextToText, **options)
        build = _input_builder(self.source)
        penalty = model.generation_config.repetition_penalty
        once = GenerationConfig(
            max_new_tokens=1, do_sample=False, repetition_penalty=penalty, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip

        def prepare(pair: tuple[bytes, str]) -> dict[str, Tensor]:
            data, text = pair
            question = Question(*json.loads(text))
            inputs, tokenizer = build(decode_image(data), question.text)
            first = [tokenizer.encode(answer, add_special_tokens=False)[0] for answer in question.answers]
            return {**inputs, "answers": torch.tensor(first)}

        def compute(row: Mapping[str, Tensor]) -> Tensor:
            inputs = {name: value.to(device) for name, value in row.items() if name != "answers"}
            inputs = {
                name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()
            }
            output = model.generate(**inputs, generation_config=once)
            probabilities = output.scores[0][0].float().softmax(-1)
            answers = row["answers"].to(device)
            is_first = torch.isin(probabilities.argmax(), answers)
            return torch.stack((probabilities[answers].sum(), is_first.float()))[None]

        return LoadedEncoder(prepare, compute, lambda rows: rows[0], max_batch=1)


InputBuilder = Callable[[Any, str], tuple[Mapping[str, Tensor], Any]]
"""Turns an image and a question into the inputs of a model; returns its tokenizer too."""


def _input_builder(folder: Path) -> InputBuilder:
    from transformers import AutoConfig, AutoProcessor

    if AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type.startswith("qwen"):
        return qwen_builder(folder)
    processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    switch = _switch_thinking_off(folder, processor, processor.chat_template)

    def build(image: Any, question: str) -> tuple[Mapping[str, Tensor], Any]:
        message = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}
        inputs = processor.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **switch
        )
        return inputs, processor.tokenizer

    return build


def _switch_thinking_off(folder: Path, templates: Any, template: str | None) -> dict[str, bool]:
    """Return the argument of a chat template that makes a model answer at once; refuse a model that cannot."""
    switch = {"enable_thinking": False} if "enable_thinking" in str(template) else {}
    content = [{"type": "text", "text": ""}]
    text = templates.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, chat_template=template,
        **switch,
    )  # fmt: skip
    if text.rstrip().endswith("<think>"):
        raise UserError(
            f"The model in {folder} thinks before it answers.",
            "The probability of Yes as its first word says nothing about the image.",
            f"Give a model that answers at once, such as {SCORES['vqascore'].downloads[0].origin}.",
        )
    return switch


def qwen_builder(folder: Path, added_tokens: Sequence[str] = (), image_tokens: int | None = None) -> InputBuilder:
    """Do what Qwen's processors do for one image: those of transformers need torchvision, for videos.

    `image_tokens` resizes every image to about so many tokens; otherwise the checkpoint's limits hold.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if added_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": list(added_tokens)})
    processor: Any = AutoImageProcessor.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, backend="pil"
    )
    template = tokenizer.chat_template
    if template is None and (file := folder / "chat_template.json").is_file():
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    switch = _switch_thinking_off(folder, tokenizer, template)
    mark = tokenizer.convert_ids_to_tokens(config.image_token_id)
    pixels = image_tokens and image_tokens * (processor.patch_size * processor.merge_size) ** 2
    size = {"size": {"shortest_edge": pixels, "longest_edge": pixels}} if pixels else {}

    def build(image: Any, question: str) -> tuple[Mapping[str, Tensor], Any]:
        content = [{"type": "image"}, {"type": "text", "text": question.replace(mark, "")}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, chat_template=template,
            **switch,
        )  # fmt: skip
        try:
            seen = processor(images=[image], return_tensors="pt", **size)
        except ValueError as error:  # of an image 200 times as long as wide
            raise ImageDecodeError("", first_line(error)) from None
        count = int(seen["image_grid_thw"].prod()) // processor.merge_size**2
        inputs = tokenizer(text.replace(mark, mark * count), return_tensors="pt")
        types = (inputs["input_ids"] == config.image_token_id).long()
        return {**inputs, **seen, "mm_token_type_ids": types}, tokenizer

    return build


@dataclass(frozen=True)
class JudgedScore(ImageScore):
    """A score that a judge's answers give."""

    encoder: Encoder
    about: str

    @property
    def note(self) -> str:
        """How it is computed."""
        return f"{self.about}; judge {self.folder.name}"

    def ask(
        self, images: Sequence[FeatureItem], questions: Sequence[Sequence[Question]], compute: ComputeFeatures
    ) -> list[list[Answer]]:
        """Return the answers to the questions of each image."""
        asked = [
            (image, json.dumps(question))
            for image, of_image in zip(images, questions, strict=True)
            for question in of_image
        ]
        items = pair_items([image for image, _ in asked], [text for _, text in asked])
        rows = iter(compute(self.encoder, items, "questions").aligned(len(items)).tolist() if items else ())
        answers = [[next(rows) for _ in of_image] for of_image in questions]
        return [[Answer(probability, first > 0.5) for probability, first in of_image] for of_image in answers]


class VqaScore(JudgedScore):
    """The probability of Yes to the question whether the image shows the prompt (Lin et al. 2024)."""

    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the probability for each image."""
        questions = [
            [Question(f'Does this figure show "{prompt}"? Please answer Yes or No.', ("Yes",))] for prompt in prompts
        ]
        return np.array([answer.probability for (answer,) in self.ask(images, questions, compute)])


class GenEval2Prompt(NamedTuple):
    """What is asked about the images of a prompt."""

    questions: Sequence[Question]
    skills: Sequence[str]
    """Of each question; empty where the file does not tell."""
    atoms: int | None
    """How many objects, attributes, counts and relations the prompt has."""


@dataclass(frozen=True)
class SoftTifa(JudgedScore):
    """The mean probability of the right answers to the questions of a prompt, in percent (GenEval 2)."""

    prompts: Mapping[str, GenEval2Prompt]
    is_geometric: bool
    applies_to = "images with a prompt of --geneval2_questions"

    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the score of each image."""
        answers = self._answers(images, prompts, compute)
        means = []
        for of_image in answers:
            found = np.array([answer.probability for answer in of_image])
            with np.errstate(divide="ignore"):  # the logarithm of 0, for a mean of 0
                mean = (
                    np.exp(np.log(found).mean())
                    if self.is_geometric and len(found)
                    else found.sum() / max(1, len(found))
                )
            means.append(100 * mean if len(found) else np.nan)
        return np.array(means)

    def warnings(self, images: Sequence[FeatureItem], prompts: Sequence[str]) -> list[str]:
        """Count the prompts without an image."""
        found = {prompt.strip() for prompt in prompts}.intersection(self.prompts)
        return _warn_of_missing("GenEval 2", len(self.prompts) - len(found), len(self.prompts))

    def _answers(
        self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures
    ) -> list[list[Answer]]:
        known = [self.prompts.get(prompt.strip()) for prompt in prompts]
        return self.ask(images, [of_prompt.questions if of_prompt else () for of_prompt in known], compute)

    def breakdown(
        self, images: Sequence[FeatureItem], prompts: Sequence[str], values: np.ndarray, compute: ComputeFeatures
    ) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the score by the number of atoms, or that of atoms by their skill, as soft_tifa_analysis.py does."""
        known = [self.prompts.get(prompt.strip()) for prompt in prompts]
        if self.is_geometric:
            rows = [
                [(str(of_prompt.atoms), value)] if of_prompt and of_prompt.atoms else []
                for of_prompt, value in zip(known, values, strict=True)
            ]
            return {"GenEval 2 atom count": _by_part(rows)}
        skills = [of_prompt.skills if of_prompt else () for of_prompt in known]
        rows = [
            [(skill, 100 * answer.probability) for skill, answer in zip(of_prompt, of_image, strict=False)]
            for of_prompt, of_image in zip(skills, self._answers(images, prompts, compute), strict=True)
        ]
        return {"GenEval 2 skill": _by_part(rows)}


def _by_part(rows: Sequence[Sequence[tuple[str, float]]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return points and questions of each image by part; an image that the judge cannot take has none."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for index, of_image in enumerate(rows):
        for name, points in of_image if np.isfinite([points for _, points in of_image]).all() else ():
            of_part = found.setdefault(name, (np.zeros(len(rows)), np.zeros(len(rows))))
            of_part[0][index] += points
            of_part[1][index] += 1
    return dict(sorted(found.items(), key=lambda part: part[0].zfill(2) if part[0].isdigit() else part[0]))


def _warn_of_missing(benchmark: str, missing: int, prompts: int) -> list[str]:
    text = (
        f"No image belongs to {missing:,} of the {prompts:,} prompts of {benchmark}: published values average over all."
    )
    return [text] if missing else []


def read_geneval2(path: Path) -> dict[str, GenEval2Prompt]:
    """Read GenEval 2 by prompt."""
    found = {}
    for number, cells in _rows(path, _GENEVAL2_FILE):
        pairs = cells.get("vqa_list")
        valid = (
            isinstance(pairs, list)
            and pairs
            and all(
                isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
                for pair in pairs
            )
        )
        if not isinstance(prompt := cells.get("prompt"), str) or not isinstance(pairs, list) or not valid:
            raise _bad_questions(
                path, f"line {number} has no prompt with a vqa_list of questions and answers", _GENEVAL2_FILE
            )
        skills, atoms = cells.get("skills"), cells.get("atom_count")
        found[prompt.strip()] = GenEval2Prompt(
            [_soft_tifa_question(*pair) for pair in pairs],
            tuple(map(str, skills)) if isinstance(skills, list) and len(skills) == len(pairs) else (),
            atoms if isinstance(atoms, int) else None,
        )
    return found


def _soft_tifa_question(question: str, answer: str) -> Question:
    answers: tuple[str, ...] = _YES
    if question.startswith("How many"):
        digits = str(_NUMBERS.index(answer) + 1) if answer in _NUMBERS else "other"  # as the published script has it
        answers = (answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}", digits, f" {digits}")
    return Question(f"{question} Answer in one word.", answers)


class DpgQuestion(NamedTuple):
    """A question of DPG-Bench, which counts only if those it depends on are answered with yes."""

    number: int
    text: str
    parents: tuple[int, ...]
    category: str


@dataclass(frozen=True)
class DpgBench(JudgedScore):
    """The share of questions answered with yes, in percent; no to a question is no to those that depend on it."""

    questions: Mapping[str, Sequence[DpgQuestion]]
    """By prompt, and by the name of the prompt's file."""
    applies_to = "images with a prompt of --dpg_questions, or the name of one"

    def _questions_of(self, images: Sequence[FeatureItem], prompts: Sequence[str]) -> list[Sequence[DpgQuestion]]:
        return [
            self.questions.get(prompt.strip(), self.questions.get(prompt_id(image.content), ()))
            for image, prompt in zip(images, prompts, strict=True)
        ]

    def warnings(self, images: Sequence[FeatureItem], prompts: Sequence[str]) -> list[str]:
        """Count the prompts without an image."""
        known = {id(questions) for questions in self.questions.values()}  # each is known by its prompt and its name
        found = known.intersection(map(id, self._questions_of(images, prompts)))
        return _warn_of_missing("DPG-Bench", len(known) - len(found), len(known))

    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the score of each image."""
        of_images = self._questions_of(images, prompts)
        shares = []
        for questions, answers in zip(of_images, self._answers(images, of_images, compute), strict=True):
            yes = {question.number: answer.is_first for question, answer in zip(questions, answers, strict=True)}
            for question in questions:
                yes[question.number] &= all(yes[parent] for parent in question.parents)
            is_known = yes and not any(np.isnan(answer.probability) for answer in answers)
            shares.append(100 * sum(yes.values()) / len(yes) if is_known else np.nan)
        return np.array(shares)

    def _answers(
        self, images: Sequence[FeatureItem], of_images: Sequence[Sequence[DpgQuestion]], compute: ComputeFeatures
    ) -> list[list[Answer]]:
        asked = [[Question(f"{q.text} Answer in one word.", _YES) for q in questions] for questions in of_images]
        return self.ask(images, asked, compute)

    def breakdown(
        self, images: Sequence[FeatureItem], prompts: Sequence[str], values: np.ndarray, compute: ComputeFeatures
    ) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the questions answered with yes by their category, whatever the questions they depend on."""
        of_images = self._questions_of(images, prompts)
        rows = [
            [
                (question.category, 100 * float(answer.is_first) if np.isfinite(answer.probability) else np.nan)
                for question, answer in zip(questions, answers, strict=True)
                if question.category
            ]
            for questions, answers in zip(of_images, self._answers(images, of_images, compute), strict=True)
        ]
        return {"DPG-Bench category": _by_part(rows)}


def read_dpg(path: Path) -> dict[str, list[DpgQuestion]]:
    """Read the questions of DPG-Bench, by prompt and by the name of the prompt's file."""
    found: dict[str, list[DpgQuestion]] = {}
    prompts: dict[str, str] = {}
    for number, cells in _rows(path, _DPG_FILE):
        try:
            name, text = str(cells["item_id"]), str(cells["question_natural_language"])
            parents = (int(parent) for parent in str(cells["dependency"]).split(","))
            category = str(cells.get("tuple") or "").partition("(")[0].partition("-")[0].strip()
            question = DpgQuestion(int(str(cells["proposition_id"])), text, tuple(filter(None, parents)), category)
            prompts[name] = str(cells["text"]).strip()
        except (KeyError, ValueError) as error:
            raise _bad_questions(path, f"line {number} is not one of DPG-Bench ({error})", _DPG_FILE) from None
        found.setdefault(name, []).append(question)
    for name, questions in found.items():
        known = {question.number for question in questions}
        if lost := {parent for question in questions for parent in question.parents} - known:
            raise _bad_questions(
                path, f"question {min(lost)} of {name}, on which another depends, is missing", _DPG_FILE
            )
    return found | {prompts[name]: questions for name, questions in found.items()}


def _rows(path: Path, origin: str) -> Iterable[tuple[int, Mapping[str, object]]]:
    if not path.is_file():
        raise UserError(
            f"The questions {path} do not exist.", f"They are {origin}.", "Copy the file, and give its path."
        )
    rows = list(table_rows(path))
    if not rows:
        raise _bad_questions(path, "it has no rows", origin)
    return rows


def _bad_questions(path: Path, why: str, origin: str) -> UserError:
    return UserError(f"{path} does not hold questions: {why}.", f"They are {origin}.", "Copy the file again.")


def _judge(key: str, folder: Path, sha256: str) -> JudgeEncoder:
    from transformers import AutoModelForImageTextToText

    load_checkpoint(key, folder, AutoModelForImageTextToText, dtype="auto", device_map="meta")
    try:
        _input_builder(folder)
    except UserError:
        raise
    except Exception as error:  # of a foreign folder
        raise unusable(key, folder, error) from None
    return JudgeEncoder(folder, sha256, 2, "judge", key=key)


def _with_questions(sha256: str, questions: Path) -> str:
    """Return a hash of judge and questions: values of other questions are not comparable."""
    return hashlib.sha256(f"{sha256}{file_sha256(questions)}".encode()).hexdigest()


def _open_vqascore(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    about = 'P("Yes") to: Does this figure show "PROMPT"? Please answer Yes or No.'
    return VqaScore(folder, sha256, _judge("vqascore", folder, sha256), about)


def _open_geneval2(folder: Path, sha256: str, settings: EvaluateSettings, is_geometric: bool = True) -> ImageScore:
    file = Path(settings.geneval2_questions or "")
    questions = read_geneval2(file)
    about = f"Soft-TIFA, {'geometric' if is_geometric else 'arithmetic'} mean over the questions of a prompt, x 100"
    judge = _judge("geneval2", folder, sha256)
    return SoftTifa(folder, _with_questions(sha256, file), judge, about, questions, is_geometric)


def _open_geneval2_am(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    return _open_geneval2(folder, sha256, settings, is_geometric=False)


def _open_dpg(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    file = Path(settings.dpg_questions or "")
    questions = read_dpg(file)
    about = "share of questions answered with yes, with their dependencies, x 100; published values use mPLUG-large"
    return DpgBench(folder, _with_questions(sha256, file), _judge("dpg", folder, sha256), about, questions)


OPENERS = {
    "vqascore": _open_vqascore,
    "geneval2": _open_geneval2,
    "geneval2_am": _open_geneval2_am,
    "dpg": _open_dpg,
}
