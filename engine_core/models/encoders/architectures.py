"""Architectures of encoders, and of decoders with a head of labels."""

from __future__ import annotations

from ..architecture import own
from ..configs import bert, labels, llama, modern_bert, nomic

DENSE = ("weights that are not packed",)
ENCODER_ARCHITECTURES = {
    "BertForSequenceClassification": own(
        "encoders.bert:BertClassifier",
        bert.read_bert_classifier,
        "BERT as a reranker or a classifier: ms-marco-MiniLM",
    ),
    "BertModel": own("encoders.bert:Bert", bert.read_bert, "BERT, MiniLM, BGE, E5", "bert"),
    "ModernBertForSequenceClassification": own(
        "encoders.modern_bert:ModernBertClassifier",
        modern_bert.read_modern_bert_classifier,
        "ModernBERT as a reranker or a classifier",
        limits=DENSE,
    ),
    "ModernBertModel": own(
        "encoders.modern_bert:ModernBert",
        modern_bert.read_modern_bert,
        "ModernBERT",
        "modernbert",
        limits=DENSE,
    ),
    "MPNetModel": own("encoders.mpnet:MPNet", bert.read_mpnet, "MPNet", "mpnet", limits=DENSE),
    "NomicBertModel": own(
        "encoders.nomic:NomicBert",
        nomic.read_nomic,
        "nomic-embed-text",
        "nomic_bert",
        limits=DENSE,
    ),
    "Qwen3ForSequenceClassification": own(
        "decoder:Decoder",
        labels.classifier(llama.read_qwen3),
        "Qwen3 as a reranker or a classifier",
    ),
    "RobertaForSequenceClassification": own(
        "encoders.bert:RobertaClassifier",
        bert.read_roberta_classifier,
        "RoBERTa as a reranker or a classifier",
    ),
    "RobertaModel": own("encoders.bert:Bert", bert.read_roberta, "RoBERTa", "roberta"),
    "XLMRobertaForSequenceClassification": own(
        "encoders.bert:RobertaClassifier",
        bert.read_roberta_classifier,
        "XLM-RoBERTa as a reranker or a classifier: bge-reranker-v2-m3",
    ),
    "XLMRobertaModel": own(
        "encoders.bert:Bert",
        bert.read_roberta,
        "XLM-RoBERTa, bge-m3 (dense), multilingual E5",
        "xlm-roberta",
    ),
}
