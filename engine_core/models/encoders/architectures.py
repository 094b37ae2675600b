"""Architectures of encoders, and of decoders with labels."""

from __future__ import annotations

from ..architecture import own
from ..configs import bert, gemma, labels, llama, modern_bert, nomic

DENSE = ("weights that are not packed",)
ENCODER_ARCHITECTURES = {
    "BertForSequenceClassification": own(
        "encoders.bert:BertClassifier",
        bert.read_bert_classifier,
        "BERT with labels: ms-marco-MiniLM",
    ),
    "BertModel": own("encoders.bert:Bert", bert.read_bert, "BERT, MiniLM, BGE, E5", "bert"),
    "Gemma2ForSequenceClassification": own(
        "gemma3:Gemma3", labels.classifier(gemma.read_gemma2), "Gemma 2 with labels"
    ),
    "LlamaForSequenceClassification": own(
        "decoder:Decoder", labels.classifier(llama.read_llama), "Llama with labels"
    ),
    "MistralForSequenceClassification": own(
        "decoder:Decoder", labels.classifier(llama.read_mistral), "Mistral with labels"
    ),
    "ModernBertForSequenceClassification": own(
        "encoders.modern_bert:ModernBertClassifier",
        modern_bert.read_modern_bert_classifier,
        "ModernBERT with labels",
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
    "Qwen2ForSequenceClassification": own(
        "decoder:Decoder", labels.classifier(llama.read_qwen2), "Qwen2 with labels"
    ),
    "Qwen3ForSequenceClassification": own(
        "decoder:Decoder", labels.classifier(llama.read_qwen3), "Qwen3 with labels"
    ),
    "RobertaForSequenceClassification": own(
        "encoders.bert:RobertaClassifier",
        bert.read_roberta_classifier,
        "RoBERTa with labels",
    ),
    "RobertaModel": own("encoders.bert:Bert", bert.read_roberta, "RoBERTa", "roberta"),
    "XLMRobertaForSequenceClassification": own(
        "encoders.bert:RobertaClassifier",
        bert.read_roberta_classifier,
        "XLM-RoBERTa with labels: bge-reranker-v2-m3",
    ),
    "XLMRobertaModel": own(
        "encoders.bert:Bert",
        bert.read_roberta,
        "XLM-RoBERTa, bge-m3, multilingual E5",
        "xlm-roberta",
    ),
}
