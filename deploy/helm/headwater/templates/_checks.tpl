{{- /* Refuses engines whose values do not fit each other, which values.schema.json cannot see. */ -}}
{{- define "headwater.checkEngines" -}}
{{- $names := dict -}}
{{- $models := dict -}}
{{- $prompts := dict -}}
{{- range $i, $engine := include "headwater.engines" . | fromJsonArray -}}
{{- $at := printf "engines[%d]" $i -}}
{{- if hasKey $names .name -}}
{{- fail (printf "%s.name is %q, as that of %s; allowed: another name" $at .name (get $names .name)) -}}
{{- end -}}
{{- $_ := set $names .name $at -}}
{{- if and $.Values.keda.enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.minReplicas is %v; allowed: at most maxReplicas (%v)" $at .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if and .gpus (eq .device "cpu") -}}
{{- fail (printf "%s.gpus is %v; allowed: 0 with device cpu, or another device" $at .gpus) -}}
{{- end -}}
{{- if and (gt (int .hosts) 1) (ne (int .hosts) (int .pipelineParallelSize)) -}}
{{- fail (printf "%s.hosts is %v; allowed: 1, or pipelineParallelSize (%v), a stage for each" $at .hosts .pipelineParallelSize) -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" .resources | toString -}}
{{- if and (ne .device "cpu") $limit (lt (include "headwater.mebibytes" $limit | int) 8192) -}}
{{- fail (printf "%s.resources.limits.memory is %s; allowed with device %s: 8Gi or more, or no limit" $at $limit .device) -}}
{{- end -}}
{{- $served := include "headwater.servedName" . -}}
{{- $model := printf "%q at revision %q" .model .revision -}}
{{- if and (hasKey $models $served) (ne $model (get $models $served)) -}}
{{- fail (printf "%s serves %s as %q; allowed: another servedModelName, as that is %s" $at $model $served (get $models $served)) -}}
{{- end -}}
{{- $_ := set $models $served $model -}}
{{- $shared := toJson .sharedPrompts -}}
{{- if and (hasKey $prompts $served) (ne $shared (get $prompts $served)) -}}
{{- fail (printf "%s.sharedPrompts is %s; allowed: those of the other entry for %s, %s" $at $shared $served (get $prompts $served)) -}}
{{- end -}}
{{- $_ := set $prompts $served $shared -}}
{{- end -}}
{{- end -}}
