"""The documents and papers that claims come from: one table for the command, the pages and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard._errors import RegardError


@dataclass(frozen=True)
class Document:
    """One of the five course documents, or the article, that the claims are taken from.

    - ``key``: the name for ``--source`` and for links.
    - ``label``: a short name for lists.
    - ``title``: the title as the document gives it, or a description if it has none.
    - ``kind``: what it is, who signed it and when, as far as the document says.
    - ``about``: what it covers, in one sentence.
    - ``sections``: for each section that a claim cites, its heading or its question.
    - ``papers``: keys of the papers that the document names, or whose results it explains.
    """

    key: str
    label: str
    title: str
    kind: str
    about: str
    sections: Mapping[str, str]
    papers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A published paper: ``authors``, ``year``, ``title``, where it appeared, and its number at arxiv.org."""

    authors: str
    year: int
    title: str
    venue: str
    arxiv: str

    @property
    def short(self) -> str:
        """Authors and year, for example "Shaw et al. 2018"."""
        names = self.authors.split(", ")
        if len(names) == 2:
            return f"{names[0]} and {names[1]} {self.year}"
        return f"{names[0]} et al. {self.year}"

    @property
    def text(self) -> str:
        """The complete reference in one line."""
        return f"{self.authors} ({self.year}): {self.title}. {self.venue}, arXiv:{self.arxiv}."

    @property
    def address(self) -> str:
        """The address of the paper at arxiv.org."""
        return f"https://arxiv.org/abs/{self.arxiv}"


PAPERS = {
    "vaswani-2017": Paper(
        "Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser, Polosukhin",
        2017,
        "Attention Is All You Need",
        "NeurIPS 2017",
        "1706.03762",
    ),
    "cordonnier-2020": Paper(
        "Cordonnier, Loukas, Jaggi",
        2020,
        "On the Relationship between Self-Attention and Convolutional Layers",
        "ICLR 2020",
        "1911.03584",
    ),
    "dosovitskiy-2021": Paper(
        "Dosovitskiy, Beyer, Kolesnikov, Weissenborn, Zhai, Unterthiner, Dehghani, Minderer, Heigold, Gelly, "
        "Uszkoreit, "
        "Houlsby",
        2021,
        "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
        "ICLR 2021",
        "2010.11929",
    ),
    "shaw-2018": Paper(
        "Shaw, Uszkoreit, Vaswani",
        2018,
        "Self-Attention with Relative Position Representations",
        "NAACL 2018",
        "1803.02155",
    ),
    "ba-2016": Paper("Ba, Kiros, Hinton", 2016, "Layer Normalization", "preprint", "1607.06450"),
    "ioffe-2015": Paper(
        "Ioffe, Szegedy",
        2015,
        "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift",
        "ICML 2015",
        "1502.03167",
    ),
    "brunner-2020": Paper(
        "Brunner, Liu, Pascual, Richter, Ciaramita, Wattenhofer",
        2020,
        "On Identifiability in Transformers",
        "ICLR 2020",
        "1908.04211",
    ),
    "olsson-2022": Paper(
        "Olsson, Elhage, Nanda, Joseph, DasSarma, Henighan, Mann, Askell, Bai, Chen, Conerly, Drain, Ganguli, "
        "Hatfield-Dodds, Hernandez, Johnston, Jones, Kernion, Lovitt, Ndousse, Amodei, Brown, Clark, Kaplan, "
        "McCandlish, Olah",
        2022,
        "In-context Learning and Induction Heads",
        "Transformer Circuits Thread",
        "2209.11895",
    ),
    "rabe-2021": Paper("Rabe, Staats", 2021, "Self-attention Does Not Need O(n²) Memory", "preprint", "2112.05682"),
}

_DOCUMENTS = (
    Document(
        "assignment-6",
        "Assignment 6",
        "Natural Language Processing: Assignment 6",
        "unsigned course document, Fall 2022",
        "A walkthrough of an assignment: it counts the parameters and the operations of multi-head attention, shows "
        "that "
        "attention can be a convolution, and describes how heads change in training.",
        {
            "1.2": "Calculating the Number of Parameters",
            "1.3": "The Mathematical Formulation of Self-Attention",
            "2.1": "Complexity with Absolute Positional Encoding",
            "2.2": "Complexity with Relative Positional Encoding",
            "3.2": "The Formal Proof of Equivalence",
            "3.2.1": "Mapping the Concepts",
            "3.3": "Extensions to Other Convolution Types",
            "4.1": "Hard vs. Soft Attention: The Role of α",
            "4.2": "How Attention Heads Evolve During Training",
        },
        ("cordonnier-2020",),
    ),
    Document(
        "exam-answers",
        "Exam answers",
        "Deep Learning - Self-Attention & Transformers (University Sources) - ANSWERED",
        "unsigned and undated answers to exam questions",
        "Answers to two exam questions: the formula of self-attention, its scale, its cost, and why it does not see "
        "order; "
        "then the sizes, an algorithm, the masks and the specialisation of multi-head attention.",
        {
            "1 (a)": "Define the self-attention mechanism mathematically",
            "1 (b)": "Prove that the attention weights sum to 1",
            "1 (c)": "Analyze the computational and space complexity",
            "1 (d)": "Permutation invariance and positional encoding",
            "2 (a)": "Design a multi-head attention mechanism with 8 heads",
            "2 (b)": "Implement the multi-head attention algorithm in pseudocode",
            "2 (c)": "Why multiple attention heads capture different types of relationships",
        },
        ("vaswani-2017",),
    ),
    Document(
        "homework-3",
        "Homework 3",
        "DL-HW3",
        "unsigned homework answers, 28 February 2024",
        "Answers about attention with vectors as columns: its scale, noise on keys, several heads, cases in which it "
        "acts "
        "as a convolution, the parts of a transformer, and vision transformers.",
        {
            "1.1 (a)": "Attention: the formula",
            "1.1 (c)": "Attention: β approaches infinity",
            "1.1 (d)": "Attention: β approaches zero",
            "1.1 (e)": "Attention: one key is perturbed by noise",
            "1.1 (f)": "Attention: one key is scaled",
            "1.2 (a)": "Multi-Headed Attention: the formula",
            "1.2 (b)": "Multi-Headed Attention: similarity with a CNN",
            "1.3 (a)": "Self Attention: the formula",
            "1.3 (c)": "Self Attention: orthogonal keys",
            "1.3 (d)": "Self Attention: diagonal weights",
            "1.3 (e)": "Self Attention: weights on immediate neighbors",
            "1.4 (b)": "Transformer: what self-attention improves",
            "1.4 (c)": "Transformer: multi-head attention",
            "1.4 (d)": "Transformer: feed-forward networks",
            "1.5 (a)": "ViT: the difference from CNNs",
        },
        ("vaswani-2017", "dosovitskiy-2021"),
    ),
    Document(
        "solution-sheet",
        "Solution sheet",
        "untitled problems with solutions: Scaled Dot-Product Attention, Multi-head Attention, Layer Normalization",
        "unsigned, undated course document without a title",
        "Problems with solutions: why scores are divided by √d, the receptive field, masks in three kinds of "
        "transformers, the cost of multi-head attention, and two properties of layer normalization.",
        {
            "1 (a)": "Why scores are divided by √d",
            "2 (a)": "The receptive field of a node at layer n",
            "2 (b)": "Key padding masks and causal masks",
            "2 (c)": "The asymptotic time complexity of multi-head attention",
            "2 (d)": "The computational efficiency bottleneck",
            "3 (a)": "What layer and batch normalization depend on",
            "3 (b)": "The norm of a layer-normalized vector",
        },
        ("vaswani-2017", "ba-2016", "ioffe-2015"),
    ),
    Document(
        "worked-answers",
        "Worked answers",
        "Self-Attention and Transformers",
        "unsigned and undated answers to an assignment",
        "Answers about one query and n keys: when attention copies a value, when it averages two, and what noise on a "
        "key "
        "does to one head and to two.",
        {
            "(a)": "Copying in attention",
            "(b)": "An average of two",
            "(c)": "Drawbacks of single headed attention",
            "(d)": "Benefits of multi-headed attention",
        },
    ),
    Document(
        "circuits-article",
        "Circuits article",
        "A Mathematical Framework for Transformer Circuits",
        "article by Elhage and others, Transformer Circuits Thread, December 2021",
        "What the weights of attention heads say without any input: their QK and OV matrices, heads that copy, and how "
        "heads of two layers compose.",
        {
            "Information movement": "Attention Heads as Information Movement",
            "OV and QK matrices": "Summarizing OV/QK Matrices",
            "Three kinds of composition": "Three Kinds of Composition",
            "Two-layer model": "Analyzing a Two-Layer Model",
        },
        ("olsson-2022",),
    ),
)
DOCUMENTS = {document.key: document for document in _DOCUMENTS}


def citation_text(key: str, section: str) -> str:
    """A document and a section of it in a few words: "Assignment 6, 4.1"."""
    return f"{DOCUMENTS[key].label}, {section}"


def citation_dict(key: str, section: str) -> dict[str, Any]:
    """A citation as plain data, for JSON."""
    document = DOCUMENTS[key]
    return {
        "document": key,
        "label": document.label,
        "title": document.title,
        "kind": document.kind,
        "section": section,
        "heading": document.sections[section],
    }


def check_citations(claim_id: str, citations: tuple[tuple[str, str], ...], papers: tuple[str, ...]) -> None:
    """Raise ``RegardError`` for a document, a section or a paper that is not in the tables."""
    if not citations:
        raise RegardError(f"{claim_id}: citations must name at least one document and section, got none")
    for key, section in citations:
        if key not in DOCUMENTS:
            raise RegardError(
                f"{claim_id}: the document of a citation must be one of {', '.join(DOCUMENTS)}, got {key!r}"
            )
        if section not in DOCUMENTS[key].sections:
            known = "; ".join(DOCUMENTS[key].sections)
            raise RegardError(f"{claim_id}: the section of a citation of {key} must be one of {known}, got {section!r}")
    for paper in papers:
        if paper not in PAPERS:
            raise RegardError(f"{claim_id}: papers must be of {', '.join(PAPERS)}, got {paper!r}")
