"""What RAG stacks see of a gateway: python rag_client.py URL EMBEDDER RERANKER prints one JSON
object. URL is the gateway's root."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version

# Clients look for a key of their own services.
os.environ |= {"COHERE_API_KEY": "any", "CO_API_KEY": "any", "OPENAI_API_KEY": "any"}

import cohere
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from langchain_cohere import CohereRerank as LangChainRerank
from langchain_core.documents import Document as LangChainDocument
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank as LlamaIndexRerank

url, embedder, reranker = sys.argv[1:]
query = "a a"
texts = ["b", "c b c", "a c"]
api = f"{url}/v1"


def of_cohere() -> dict[str, list[list[float]]]:
    """(place, score) of each document, the best first."""
    found = {}
    for name, make in (("v1", cohere.Client), ("v2", cohere.ClientV2)):
        client = make(api_key="any", base_url=url)
        reply = client.rerank(model=reranker, query=query, documents=texts, top_n=3)
        found[name] = [[each.index, each.relevance_score] for each in reply.results]
    return found


def of_langchain() -> dict[str, object]:
    embeddings = OpenAIEmbeddings(
        base_url=api, api_key="any", model=embedder, check_embedding_ctx_length=False
    )
    client = cohere.ClientV2(api_key="any", base_url=url)
    ranked = LangChainRerank(client=client, model=reranker, top_n=2).compress_documents(
        [LangChainDocument(page_content=text) for text in texts], query
    )
    return {
        "vectors": embeddings.embed_documents(texts),
        "ranked": [[each.page_content, each.metadata["relevance_score"]] for each in ranked],
    }


def of_llama_index() -> dict[str, object]:
    embedding = OpenAILikeEmbedding(model_name=embedder, api_base=api, api_key="any")
    rerank = LlamaIndexRerank(api_key="any", base_url=url, model=reranker, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in texts]
    ranked = rerank.postprocess_nodes(nodes, query_str=query)
    return {
        "vectors": embedding.get_text_embedding_batch(texts),
        "ranked": [[each.node.get_content(), each.score] for each in ranked],
    }


def of_haystack() -> dict[str, object]:
    documents = [Document(content=text) for text in texts]
    asked = {"model": embedder, "api_base_url": api}
    embedded = OpenAIDocumentEmbedder(**asked, progress_bar=False).run(documents)["documents"]
    alone = OpenAITextEmbedder(**asked).run(texts[0])["embedding"]
    ranker = CohereRanker(model=reranker, api_base_url=url, top_k=2)
    ranked = ranker.run(query=query, documents=documents)["documents"]
    return {
        "vectors": [each.embedding for each in embedded],
        "alone": alone,
        "ranked": [[each.content, each.score] for each in ranked],
    }


print(
    json.dumps(
        {
            "versions": {
                name: version(name)
                for name in ("cohere", "langchain-openai", "llama-index-core", "haystack-ai")
            },
            "cohere": of_cohere(),
            "langchain": of_langchain(),
            "llama_index": of_llama_index(),
            "haystack": of_haystack(),
        }
    )
)
